"""`pyfly-cpp serve`: the OpenAI protocol over a `FlyBatch`.

A body is read and checked (body, requests), in threads (reading), and understood as answers that are wanted
(answer_requests): by an object for each protocol (chat, with prompts, tools, calls and thoughts; completions; native;
responses and messages, which are chats). It waits for its turn (turns), is written by the batch (service, model), and
answered piece by piece by that object (answers). app.py has the routes, security.py who may come in, server.py the
process.
"""
