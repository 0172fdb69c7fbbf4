"""One HTML page about one run, or several side by side: `python -m driver.report runs/A`."""
