"""decodegap: where every microsecond of a batch-1 LLM decode step goes, measured so that it can be trusted."""

__version__ = "0.1.0"
