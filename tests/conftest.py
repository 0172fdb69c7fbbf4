"""Options of the test command."""


def pytest_addoption(parser):
    parser.addoption(
        "--soak", type=int, default=400, metavar="N", help="passes of the engine's soak test"
    )
