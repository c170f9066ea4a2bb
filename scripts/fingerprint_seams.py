"""Print the fingerprint of every seam in the installed SGLang, or write them into the seam table with --write.

For maintainers who move the pin: read each function that changed first; the fingerprint says that somebody did.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from sglang_replayssm.plugin import seams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="rewrite sglang_replayssm/plugin/seams.py in place")
    args = parser.parse_args()
    table = Path(seams.__file__)
    text = table.read_text(encoding="utf-8")
    for seam in seams.SEAMS:
        found = seams.installed_fingerprint(seam)
        print(f"{seams.status(seam).value:8} {found} {seam.target}")
        if found:
            pattern = rf'(Seam\(\s*[^,]+,\s*"{re.escape(seam.name)}",\s*"[^"]*",\s*)"[^"]*"'
            text, count = re.subn(pattern, rf'\g<1>"{found}"', text)
            assert count == 1, f"{seam.target}: {count} entries match in the table"
    if args.write:
        table.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
