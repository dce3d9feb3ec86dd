"""OpenAI's Files and Batches: many requests in one file, answered when there is room, each exactly once.

On disk, below ``batches.folder``, every tenant has a folder of its own::

    TENANT/files/FILE-ID/      meta.json   content
    TENANT/batches/BATCH-ID/   batch.json  answers.jsonl  errors.jsonl  cancel

``batch.json`` is written by one process at a time, the one that holds ``lock``. Answers are added line by line, each on
disk before the next of its kind; whatever ends the process, the next one goes on with the lines that are missing.
"""
