"""Puts the package of a commit into asv's environment, beside all that is installed for who runs the bench.

Called by asv as `python asv_install.py COMMIT_FOLDER SITE_FOLDER...`.
"""

import shutil
import sys
import sysconfig
from pathlib import Path

source, *sites = sys.argv[1:]
library = Path(sysconfig.get_paths()["purelib"])
shutil.rmtree(library / "subject", ignore_errors=True)
shutil.copytree(Path(source) / "subject", library / "subject")
# A .pth file within a folder that a .pth file names is read only where it is a site folder.
lines = [f"import site; site.addsitedir({site!r})\n" for site in sites]
(library / "measured_with.pth").write_text("".join(lines))
