"""The one exception type of cumha that Python does not bring."""


class UnsupportedError(NotImplementedError):
    """A correct request that no path of this version can serve.

    The message lists what was asked, the reason of each path that refused it, and what to try.
    """
