"""The benchmarks of ``compiled-llm bench``.

A file each, which has ``parser(program)`` and ``main(program, arguments) -> exit status``. ``harness.py`` has what they
share: timing in turns, the table for people and the line of JSON for programs; ``workloads.py`` the requests;
``serving.py`` what those that serve requests share, ``load.py`` what those share whose requests arrive over
time. None of them is imported by the engine.
"""
