"""`pyfly-cpp serve`: the OpenAI protocol over a `FlyBatch`.

A body is read and checked (body, requests), in threads (reading), and understood as answers that are wanted
(answer_requests) by an object for each protocol: text_completions, native, and chat, which is also the core of
responses and messages; with it are prompt_reading, tools, calls and thoughts. An answer waits for its turn (turns), is
written by the batch (service, served_model), and sent piece by piece (answers, streams). app.py has the routes,
security.py who may come in, server.py the process.
"""
