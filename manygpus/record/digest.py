"""A value that is too long for a record or a table is named by its digest."""

import hashlib

# Of the value of a setting or an argument, such as a list of files.
LONGEST_VALUE_CHARACTERS = 60


def digest(content: bytes) -> str:
    """Return eight characters that differ where the content does."""
    return hashlib.sha256(content).hexdigest()[:8]


def shortened(text: str, longest_characters: int = LONGEST_VALUE_CHARACTERS) -> str:
    """Return the text, or its digest if it is longer."""
    return text if len(text) <= longest_characters else digest(text.encode())
