"""`python -m driver.report runs/A [runs/B ...]`: see `driver.report`."""

from ..cli import start

if __name__ == "__main__":
    start("report")
