"""Pure decisions of a recovery: what to do about a failure, and which step everyone goes on with."""
