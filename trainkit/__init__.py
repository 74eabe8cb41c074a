"""What is the same in every stage: who am I, options, data, model, engine, records."""

from trainkit import errors  # noqa: F401  before PyTorch, whose loading Ctrl-C may interrupt
