"""The test kit: contracts that plugins inherit, fakes that go through the real seams, validators."""

import pkgutil
import sys

if (pytest := sys.modules.get("pytest")) is not None:
    # asserts of contracts show their values in a plugin's suite too; this package itself is imported by now
    modules = (f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__))
    pytest.register_assert_rewrite(*modules)
