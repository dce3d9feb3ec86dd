"""Captioning jobs: rows of a source, each answered once by the two pools, into output that a crash cannot tear.

``sources``     what may be captioned: pictures, lists, tables, tars; each a list of fragments that a worker reads
``templates``   prompts with the row's fields
``job``         what the output depends on, and so what a job is
``captioner``   one row from its reference to its captions; knows neither Ray nor the output
``desks``       who answers: the pools, or a service over HTTP
``duplicates``  captions by content, for pictures that come more than once
``ray_flow``    the stream of rows through Ray Data; the only part that knows Ray
``output``      parts on disk, what is done, what failed; sidecars, one file at the end, a contact sheet
``tally``       what is told to a person on the way
"""
