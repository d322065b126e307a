"""The trainers' own tests, with their imports redirected to ours: `python tests/suites/run.py`."""
