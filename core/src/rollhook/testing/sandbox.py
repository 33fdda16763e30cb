"""The contract of sandbox backends.

    class TestMine(SandboxContract):
        @pytest.fixture
        def make_backend(self):
            return lambda: MyBackend(MyConfig(), build_context(tmp_path))

What the provider cannot do is declared by the backend (`gaps`), so that users see it too; a suite may add
`gaps` of its own, for what only its surroundings cannot do. Each such case must fail. Every case makes its
own backend and its own sandboxes. Cases of a capability that the backend does not declare are skipped; a
declared one must be proven.
"""

from rollhook.testing.sandbox_commands import CommandCases, OutputCases
from rollhook.testing.sandbox_files import FileCases
from rollhook.testing.sandbox_life import IsolationCases, LifeCases, LimitCases, QuiesceCases
from rollhook.testing.sandbox_timeouts import TimeoutCases
from rollhook.testing.sandbox_transfer import TransferCases

__all__ = ["SandboxContract"]


class SandboxContract(
    FileCases,
    CommandCases,
    OutputCases,
    TimeoutCases,
    TransferCases,
    LifeCases,
    QuiesceCases,
    IsolationCases,
    LimitCases,
):
    """All cases of a sandbox backend; fill the fixture `make_backend`."""
