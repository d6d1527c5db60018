"""Local training of many users at once in torch, behind the in-process transport."""
