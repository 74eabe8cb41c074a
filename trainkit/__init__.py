"""What is the same in every stage: who am I, options, data, model, engine, records."""

from trainkit import errors  # noqa: F401  before PyTorch, whose loading Ctrl-C may interrupt


def __getattr__(name: str) -> object:
    """`trainkit.launch`, loaded by whoever names it."""
    if name == "launch":
        from trainkit.launching import launch

        return launch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
