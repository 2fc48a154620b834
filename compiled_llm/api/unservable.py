"""UnservableError: what an engine cannot serve, whatever a prompt says."""


class UnservableError(ValueError):
    """What every such request needs is missing or wrong: a tokenizer, a chat template, an end-of-text token.

    Methods that serve lists of prompts raise it. Any other ``ValueError`` of a prompt or its parameters ends that
    request alone.
    """
