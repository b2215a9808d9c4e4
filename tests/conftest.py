import os

# Triton reads this once, when it is imported: on a CPU the kernels run in its interpreter.
if os.environ.get("WEFT_TEST_DEVICE", "cpu") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser):
    parser.addoption("--every-model", action="store_true", help="sweep every architecture of transformers and timm")
