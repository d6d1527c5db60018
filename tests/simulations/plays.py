"""A made-up file of Shakespeare's plays."""

import gzip
import json
from pathlib import Path


def plays_in(folder: Path) -> None:
    """37 plays of three roles each, who say the same words in capitals, and one who says less."""
    said = "Now is the winter of our discontent, made glorious summer! " * 8
    speeches = [
        {"user": f"{play}_{role}", "play": f"play {play}", "text": said}
        for play in range(37)
        for role in "ABC"
    ]
    speeches.append({"user": "0_D", "play": "play 0", "text": "Adieu."})
    (folder / "shakespeare").mkdir()
    with gzip.open(folder / "shakespeare" / "speeches.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, speeches)))
