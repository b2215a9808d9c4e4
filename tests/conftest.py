def pytest_addoption(parser):
    parser.addoption("--every-model", action="store_true", help="sweep every architecture of transformers and timm")
