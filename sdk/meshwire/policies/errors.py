"""What is wrong with a policy document."""

from __future__ import annotations


class PolicyError(ValueError):
    """A document that is no policy here. `path` names the place, as `Statement[0].Action`; `supported` is
    False when the document is right for S3 and asks for what this server does not have."""

    def __init__(self, path: str, message: str, *, supported: bool = True) -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path, self.message, self.supported = path, message, supported
