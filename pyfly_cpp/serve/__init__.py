"""`pyfly-cpp serve`: the OpenAI protocol over a `FlyBatch`.

A request is read and checked (body, checking, fields), understood as texts to write (chat, completions, responses,
orders), waits for its turn (turns), is written by the batch (service), and answered piece by piece by the object that
understood it (answers). app.py has the routes, security.py who may come in, server.py the process.
"""
