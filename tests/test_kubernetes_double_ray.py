"""The double of Kubernetes: pods and their streams, the operator's states, and real Ray behind a forward."""

from __future__ import annotations

import asyncio
import base64
import http.client
import http.server
import json
import os
import shutil
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doubles import machines
from doubles.kubernetes.client import Cluster, cluster

needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="needs kubectl: https://kubernetes.io/docs/tasks/tools"
)
needs_bwrap = pytest.mark.skipif(
    bool(machines.available()), reason=f"needs bubblewrap: {machines.available() or 'it is here'}"
)


@pytest.fixture(scope="module")
def double() -> Iterator[Cluster]:
    with cluster() as running:
        yield running


@pytest.fixture
def space(double: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    yield double.namespace(f"t{abs(hash(request.node.nodeid)) % 10**9}")
    double.clear_faults()
    double.clear_scripts()


class Kubectl:
    """The unmodified client, in a namespace."""

    def __init__(self, double: Cluster, space: str) -> None:
        self.env = {**os.environ, "KUBECONFIG": str(double.kubeconfig), "HOME": str(double.directory)}
        self.space = space

    def start(self, *argv: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["kubectl", "-n", self.space, *argv],
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def __call__(self, *argv: str, stdin: Any = None, code: int = 0) -> str:
        text = stdin if isinstance(stdin, str | None) else json.dumps(stdin)
        done = subprocess.run(
            ["kubectl", "-n", self.space, *argv],
            env=self.env, input=text, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture
def kubectl(double: Cluster, space: str) -> Kubectl:
    return Kubectl(double, space)


def rayjob(name: str, **spec: Any) -> dict[str, Any]:
    template = {"spec": {"containers": [{"name": "ray", "image": "ray"}]}}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name, "labels": {"kueue.x-k8s.io/queue-name": "q"}, "annotations": {"a": "b"}},
        "spec": {
            "entrypoint": "true",
            "submissionMode": "HTTPMode",
            "rayClusterSpec": {
                "headGroupSpec": {"rayStartParams": {}, "template": template},
                "workerGroupSpecs": [
                    {"groupName": "w", "replicas": 2, "rayStartParams": {}, "template": template}
                ],
            },
            **spec,
        },
    }


class Api:
    """Bare requests, blocking."""

    def __init__(self, double: Cluster, space: str) -> None:
        self.double, self.space = double, space
        config = json.loads(double.kubeconfig.read_text())
        authority = base64.b64decode(config["clusters"][0]["cluster"]["certificate-authority-data"])
        tls = ssl.create_default_context(cadata=authority.decode())
        handlers = urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls)
        self.opener = urllib.request.build_opener(*handlers)

    def __call__(self, method: str, path: str, body: Any = None, media: str = "application/json") -> Any:
        roots = {"ray": "/apis/ray.io/v1", "dep": "/apis/apps/v1"}
        root = roots.get(path[:3], "/api/v1")
        url = f"{self.double.url}{root}/namespaces/{self.space}/{path}"
        request = urllib.request.Request(url, method=method)
        request.add_header("Authorization", f"Bearer {self.double.key}")
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", media)
        with self.opener.open(request, timeout=20) as answer:
            return json.loads(answer.read())

    def change(self, name: str, **spec: Any) -> None:
        self("PATCH", f"rayjobs/{name}", {"spec": spec}, "application/merge-patch+json")

    def history(self, name: str, until: str, seconds: float = 20) -> list[tuple[str, str]]:
        """Return the pairs of states that a RayJob was in, until a deployment status."""
        seen: list[tuple[str, str]] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            status = self.status(name)
            pair = (status.get("jobDeploymentStatus", ""), status.get("jobStatus", ""))
            if pair not in seen[-1:]:
                seen.append(pair)
            if pair[0] == until:
                return seen
            time.sleep(0.005)
        raise AssertionError(f"{name} is not {until}: {seen}, {self.status(name)}, {self.logs()}")

    def logs(self) -> list[str]:
        """Return the ends of the pods' logs, for a message."""
        found = []
        for each in self.double.objects("Pod", self.space):
            request = urllib.request.Request(
                f"{self.double.url}/api/v1/namespaces/{self.space}/pods/{each['metadata']['name']}/log",
                headers={"Authorization": f"Bearer {self.double.key}"},
            )
            try:
                with self.opener.open(request, timeout=20) as answer:
                    found.append(answer.read().decode()[-2000:])
            except urllib.error.HTTPError as error:
                found.append(error.read().decode())
        return found

    def status(self, name: str) -> dict[str, Any]:
        return dict(self("GET", f"rayjobs/{name}").get("status", {}))

    def wait(self, condition: Any) -> None:
        end = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < end, "waited too long"
            time.sleep(0.01)


@pytest.fixture
def api(double: Cluster, space: str) -> Api:
    return Api(double, space)


# The operator.


def test_a_job_over_http_goes_through_the_operators_states(api: Api, double: Cluster, space: str) -> None:
    double.jobs(seconds=20, match=space)
    double.pods(match="worker", unready=20)
    job = rayjob("a", shutdownAfterJobFinishes=True, ttlSecondsAfterFinished=30)
    api("POST", "rayjobs", job)
    seen = api.history("a", "Complete")
    wanted = [("Initializing", ""), ("Running", ""), ("Running", "RUNNING"), ("Complete", "SUCCEEDED")]
    assert [pair for pair in seen if pair in wanted] == [pair for pair in wanted if pair in seen]
    assert {("Initializing", ""), ("Running", "RUNNING")} <= set(seen)
    status = api.status("a")
    assert status["jobId"].startswith("a-")
    assert len(status["rayClusterName"]) == len("a-12345")
    assert status["endTime"]
    made = api("GET", f"rayclusters/{status['rayClusterName']}")
    labels = made["metadata"]["labels"]
    assert labels["ray.io/originated-from-cr-name"] == "a"
    assert labels["kueue.x-k8s.io/queue-name"] == "q"
    assert made["metadata"]["annotations"]["a"] == "b"
    assert made["status"]["state"] == "ready"
    assert made["status"]["readyWorkerReplicas"] == 2
    selector = api("GET", "services/a-head-svc")["spec"]["selector"]
    assert selector["ray.io/cluster"] == status["rayClusterName"]
    pods = double.objects("Pod", space)
    assert sorted(each["metadata"]["labels"]["ray.io/node-type"] for each in pods) == [
        "head",
        "worker",
        "worker",
    ]
    api.wait(lambda: not double.objects("RayCluster", space) and not double.objects("Pod", space))
    assert double.objects("RayJob", space)[0]["status"]["rayClusterName"] == status["rayClusterName"]


@pytest.mark.parametrize(
    ("name", "spec", "message"),
    [
        ("a", {"ttlSecondsAfterFinished": 5}, "cannot have ttlSecondsAfterFinished"),
        ("a" * 48, {}, "no more than 47 characters"),
        ("1a", {}, "DNS1035"),
        ("a", {"suspend": True}, "not allowed to be suspended"),
        ("a", {"runtimeEnvYAML": "a: ["}, "RuntimeEnvYAML"),
        ("a", {"rayClusterSpec": None}, "RayClusterSpec or ClusterSelector"),
        ("a", {"clusterSelector": {"ray.io/cluster": "c"}, "backoffLimit": 1}, "ClusterSelector"),
        ("a", {"activeDeadlineSeconds": 0}, "activeDeadlineSeconds"),
    ],
)
def test_what_the_operator_refuses_is_never_tried_again(
    api: Api, name: str, spec: dict[str, Any], message: str
) -> None:
    body = rayjob(name, **spec)
    api("POST", "rayjobs", {**body, "spec": {k: v for k, v in body["spec"].items() if v is not None}})
    assert ("ValidationFailed", "") in api.history(name, "ValidationFailed")
    status = api.status(name)
    assert status["reason"] == "ValidationFailed"
    assert message in status["message"]
    api.change(name, suspend=False, ttlSecondsAfterFinished=0)
    time.sleep(0.1)
    assert api.status(name)["jobDeploymentStatus"] == "ValidationFailed"


def test_how_a_job_ends_and_how_often_it_is_tried(api: Api, double: Cluster, space: str) -> None:
    double.jobs(match=f"{space}/fails", status="FAILED", message="exit code 3")
    double.jobs(match=f"{space}/stops", status="STOPPED")
    double.jobs(match=f"{space}/again", status="FAILED", times=1)
    double.jobs(match=f"{space}/late", seconds=None)
    api("POST", "rayjobs", rayjob("fails"))
    api("POST", "rayjobs", rayjob("stops"))
    api("POST", "rayjobs", rayjob("again", backoffLimit=1))
    api("POST", "rayjobs", rayjob("late", activeDeadlineSeconds=50))
    assert api.history("fails", "Failed")[-1] == ("Failed", "FAILED")
    status = api.status("fails")
    assert (status["reason"], status["message"], status["failed"]) == ("AppFailed", "exit code 3", 1)
    assert api.history("stops", "Complete")[-1] == ("Complete", "STOPPED")
    assert api.history("again", "Complete")[-1] == ("Complete", "SUCCEEDED")
    assert api.status("again")["failed"] == 1
    assert api.history("late", "Failed")[-1] == ("Failed", "RUNNING")
    assert api.status("late")["reason"] == "DeadlineExceeded"


def test_a_job_is_suspended_and_goes_on_in_a_new_cluster(api: Api, double: Cluster, space: str) -> None:
    double.jobs(match=space, seconds=None, times=1)
    api("POST", "rayjobs", rayjob("a", shutdownAfterJobFinishes=True))
    api.history("a", "Running")
    first = api.status("a")["rayClusterName"]
    api.change("a", suspend=True)
    api.history("a", "Suspended")
    api.wait(lambda: not double.objects("RayCluster", space))
    assert "rayClusterName" not in api.status("a")
    api.change("a", suspend=False)
    api.history("a", "Complete")
    assert api.status("a")["rayClusterName"] != first


def test_who_submits_a_job_differs_by_mode(api: Api, double: Cluster, space: str) -> None:
    double.jobs(match=space, logs=["from the job"], seconds=5)
    api("POST", "rayjobs", rayjob("k", submissionMode="K8sJobMode"))
    api("POST", "rayjobs", rayjob("i", submissionMode="InteractiveMode"))
    api.history("k", "Complete")
    pod = next(p for p in double.objects("Pod", space) if p["metadata"]["labels"].get("job-name") == "k")
    env = {each["name"]: each["value"] for each in pod["spec"]["containers"][0]["env"]}
    assert env["RAY_JOB_SUBMISSION_ID"] == api.status("k")["jobId"]
    api.wait(lambda: double.objects("Job", space)[0]["status"].get("succeeded") == 1)
    api.history("i", "Waiting")
    api.change("i", jobId="mine")
    api.history("i", "Complete")
    assert api.status("i")["jobId"] == "mine"


def test_the_operator_gives_up_on_what_never_answers(api: Api, double: Cluster, space: str) -> None:
    double.jobs(match=f"{space}/mute", seconds=None, stays="CHECK")
    double.jobs(match=f"{space}/full", stays="SUBMIT")
    double.jobs(match=f"{space}/bad", status="FAILED", message="exit code 5", seconds=3)
    api("POST", "rayjobs", rayjob("mute"))
    api("POST", "rayjobs", rayjob("full"))
    api("POST", "rayjobs", rayjob("bad", submissionMode="K8sJobMode"))
    api.history("bad", "Failed")
    found = api.status("bad")
    assert (found["reason"], found["message"], found["jobStatus"]) == ("AppFailed", "exit code 5", "FAILED")
    for name in ("mute", "full"):
        api.history(name, "Failed")
        assert api.status(name)["reason"] == "JobStatusCheckTimeoutExceeded"
        assert api.status(name)["jobStatusCheckFailureStartTime"]


def test_a_job_in_a_cluster_that_stays_leaves_it(api: Api, double: Cluster, space: str) -> None:
    body = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": "c"}}
    api("POST", "rayclusters", {**body, "spec": rayjob("x")["spec"]["rayClusterSpec"]})
    job = rayjob("j", clusterSelector={"ray.io/cluster": "c"}, shutdownAfterJobFinishes=True)
    del job["spec"]["rayClusterSpec"]
    api("POST", "rayjobs", job)
    api.history("j", "Complete")
    assert api.status("j")["rayClusterName"] == "c"
    double.jobs(match=space, seconds=None)
    api("POST", "rayjobs", rayjob("bent"))
    api.history("bent", "Running")
    api.change("bent", ttlSecondsAfterFinished=5)
    assert api.history("bent", "ValidationFailed")[-1][0] == "ValidationFailed"
    api("DELETE", "rayjobs/j")
    api.wait(lambda: [each["metadata"]["name"] for each in double.objects("RayJob", space)] == ["bent"])
    assert api("GET", "rayclusters/c")["status"]["state"] == "ready"


def test_rules_delete_what_they_name_and_a_stopped_job_matches_none(
    api: Api, double: Cluster, space: str
) -> None:
    def rule(policy: str, seconds: int) -> dict[str, Any]:
        return {"policy": policy, "condition": {"jobStatus": "SUCCEEDED", "ttlSeconds": seconds}}

    rules = {"deletionRules": [rule("DeleteWorkers", 0), rule("DeleteCluster", 30), rule("DeleteSelf", 60)]}
    double.jobs(match=f"{space}/stops", status="STOPPED")
    api("POST", "rayjobs", rayjob("stops", deletionStrategy=rules))
    api.history("stops", "Complete")
    api("POST", "rayjobs", rayjob("ends", deletionStrategy=rules))
    api.history("ends", "Complete")

    def pods(job: str) -> list[str]:
        found = [each["metadata"]["labels"] for each in double.objects("Pod", space)]
        return sorted(each["ray.io/node-type"] for each in found if each["ray.io/cluster"].startswith(job))

    api.wait(lambda: pods("ends") == ["head"])
    api.wait(lambda: pods("ends") == [])
    api.wait(lambda: [each["metadata"]["name"] for each in double.objects("RayJob", space)] == ["stops"])
    assert pods("stops") == ["head", "worker", "worker"]


def test_ready_stays_though_the_pods_die(api: Api, double: Cluster, space: str) -> None:
    body = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": "c"}}
    api("POST", "rayclusters", {**body, "spec": rayjob("x")["spec"]["rayClusterSpec"]})
    api.wait(lambda: api("GET", "rayclusters/c").get("status", {}).get("state") == "ready")
    for each in double.objects("Pod", space):
        double.kill_pod(space, each["metadata"]["name"])
    api.wait(lambda: api("GET", "rayclusters/c")["status"]["readyWorkerReplicas"] == 0)
    status = api("GET", "rayclusters/c")["status"]
    conditions = {each["type"]: each["status"] for each in status["conditions"]}
    assert (status["state"], conditions["HeadPodReady"]) == ("ready", "False")
    api("DELETE", "rayclusters/c")
    api.wait(lambda: not double.objects("Pod", space) and not double.objects("Service", space))


def test_a_cluster_is_suspended_scaled_and_made_anew(api: Api, double: Cluster, space: str) -> None:
    def change(**spec: Any) -> None:
        api("PATCH", "rayclusters/c", {"spec": spec}, "application/merge-patch+json")

    def status() -> dict[str, Any]:
        return dict(api("GET", "rayclusters/c").get("status", {}))

    def names() -> set[str]:
        return {each["metadata"]["name"] for each in double.objects("Pod", space)}

    body = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": "c"}}
    spec = rayjob("x")["spec"]["rayClusterSpec"]
    api("POST", "rayclusters", {**body, "spec": {**spec, "upgradeStrategy": {"type": "Recreate"}}})
    api.wait(lambda: status().get("state") == "ready")
    first = names()
    change(suspend=True)
    api.wait(lambda: status()["state"] == "suspended" and not names())
    change(suspend=False)
    api.wait(lambda: status()["state"] == "ready" and len(names()) == 3)
    assert not first & names()
    second = names()
    group = api("GET", "rayclusters/c")["spec"]["workerGroupSpecs"][0]
    change(workerGroupSpecs=[{**group, "replicas": 3}])
    api.wait(lambda: status()["readyWorkerReplicas"] == 3)
    assert second < names()
    change(
        workerGroupSpecs=[{**group, "template": {"spec": {"containers": [{"name": "ray", "image": "new"}]}}}]
    )
    api.wait(lambda: len(names()) == 3 and not second & names())


def test_a_deployment_has_its_pods_replaced_by_the_newest_template(
    api: Api, double: Cluster, space: str
) -> None:
    def deployment(image: str, replicas: int) -> dict[str, Any]:
        template = {
            "metadata": {"labels": {"a": "b"}},
            "spec": {"containers": [{"name": "c", "image": image}]},
        }
        spec = {"replicas": replicas, "selector": {"matchLabels": {"a": "b"}}, "template": template}
        return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"}, "spec": spec}

    def images() -> list[str]:
        return [each["spec"]["containers"][0]["image"] for each in double.objects("Pod", space)]

    api("POST", "deployments", deployment("one", 2))
    api.wait(lambda: api("GET", "deployments/d").get("status", {}).get("readyReplicas") == 2)
    api("PUT", "deployments/d", deployment("two", 1))
    api.wait(lambda: images() == ["two"])
    api.wait(lambda: api("GET", "deployments/d")["status"].get("availableReplicas") == 1)
    api("DELETE", "deployments/d")
    api.wait(lambda: images() == [])


@pytest.mark.parametrize("reason", ["ImagePullBackOff", "Unschedulable"])
def test_a_pod_waits_for_ever_and_says_why(api: Api, double: Cluster, space: str, reason: str) -> None:
    double.pods(match="head", pending=None, reason=reason)
    api("POST", "rayjobs", rayjob("a", preRunningDeadlineSeconds=20))
    api.wait(
        lambda: "Pending" in [each.get("status", {}).get("phase") for each in double.objects("Pod", space)]
    )
    head = next(
        p for p in double.objects("Pod", space) if p["metadata"]["labels"]["ray.io/node-type"] == "head"
    )
    assert reason in json.dumps(head["status"])
    api.history("a", "Failed")
    assert api.status("a")["reason"] == "PreRunningDeadlineExceeded"
    events = [each["reason"] for each in double.objects("Event", space)]
    assert ("FailedScheduling" if reason == "Unschedulable" else "Failed") in events


# kubectl, unmodified.


@needs_kubectl
@needs_bwrap
def test_kubectl_applies_gets_and_deletes(kubectl: Kubectl, double: Cluster, space: str) -> None:
    assert kubectl("auth", "can-i", "create", "rayjobs.ray.io").strip() == "yes"
    assert "v1.32" in kubectl("version")
    kubectl("create", "secret", "generic", "s", "--from-literal=token=value")
    job = rayjob("j", shutdownAfterJobFinishes=True, suspend=True)
    assert "created" in kubectl("apply", "-f", "-", stdin=job)
    job["spec"]["suspend"] = False
    assert "configured" in kubectl("apply", "-f", "-", stdin=job)
    kubectl("wait", "rayjob/j", "--for=jsonpath={.status.jobDeploymentStatus}=Complete", "--timeout=20s")
    assert "unknown field" in kubectl("apply", "-f", "-", stdin=rayjob("k", wrong=1), code=1)
    assert "serverside-applied" in kubectl("apply", "--server-side", "-f", "-", stdin=rayjob("k"))
    kubectl("patch", "rayjob", "j", "--type=merge", "-p", '{"metadata": {"labels": {"x": "y"}}}')
    assert "rayjob.ray.io/j" in kubectl("get", "rayjob", "-l", "x=y", "-o", "name")
    kubectl("delete", "rayjob", "j", "k")
    double.options(deny=[{"resource": "pods", "verb": "list", "namespace": space}])
    try:
        assert "pods is forbidden" in kubectl("get", "pods", code=1)
    finally:
        double.options(deny=[])


@needs_kubectl
@needs_bwrap
def test_kubectl_runs_commands_and_forwards_ports(
    kubectl: Kubectl, double: Cluster, space: str, tmp_path: Path
) -> None:
    double.pods(match=f"{space}/dev", logs=["one", "two"])
    kubectl("run", "dev", "--image=any", "--env=A=b", "--command", "--", "sleep", "1000")
    kubectl("wait", "pod/dev", "--for=condition=Ready", "--timeout=20s")
    assert kubectl("logs", "dev", "--tail=1") == "two\n"
    assert kubectl("exec", "-i", "dev", "--", "sh", "-c", "cat; echo $A", stdin="typed ") == "typed b\n"
    assert "exit code 3" in kubectl("exec", "dev", "--", "sh", "-c", "exit 3", code=3)
    (tmp_path / "page").write_bytes(os.urandom(3_000_000))

    class Files(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(tmp_path))

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        double.serve(space, "dev", {8265: server.server_address[1]})
        forward = kubectl.start("port-forward", "pod/dev", ":8265", ":9", "--address=127.0.0.1")
        try:
            assert forward.stdout is not None
            ports = [int(forward.stdout.readline().split(b":")[1].split()[0]) for _ in range(2)]
            for _ in range(2):
                with urllib.request.urlopen(f"http://127.0.0.1:{ports[0]}/page", timeout=20) as answer:
                    assert answer.read() == (tmp_path / "page").read_bytes()
            with pytest.raises((OSError, http.client.HTTPException)):
                urllib.request.urlopen(f"http://127.0.0.1:{ports[1]}/", timeout=20)
        finally:
            forward.terminate()
            forward.communicate(timeout=20)
            server.shutdown()
    found = [e.get("protocol") for e in double.requests("GET", f"{space}/pods/dev/")]
    assert {"v5.channel.k8s.io", "SPDY/3.1+portforward.k8s.io"} <= set(found)


# kr8s, unmodified.


@needs_bwrap
async def test_kr8s_works_unmodified(double: Cluster, space: str, tmp_path: Path) -> None:
    kr8s = pytest.importorskip("kr8s", reason="needs kr8s: pip install kr8s")
    from kr8s.asyncio.objects import Pod, new_class

    api = await kr8s.asyncio.api(kubeconfig=str(double.kubeconfig), namespace=space)
    kind = new_class("RayJob.ray.io/v1", namespaced=True, asyncio=True)
    job = await kind({**rayjob("j"), "metadata": {"name": "j", "namespace": space}}, api=api)
    await job.create()
    await asyncio.wait_for(job.wait("jsonpath='{.status.jobDeploymentStatus}'=Complete"), 20)
    await job.patch({"metadata": {"labels": {"x": "y"}}})
    assert [each.name async for each in api.get(kind, label_selector="x=y")] == ["j"]
    await job.delete()
    container = {"name": "c", "image": "any"}
    body = {"metadata": {"name": "p", "namespace": space}, "spec": {"containers": [container]}}
    pod = await Pod(body, api=api)
    double.pods(match=f"{space}/p", logs=["line"])
    await pod.create()
    await asyncio.wait_for(pod.wait("condition=Ready"), 20)
    assert [line async for line in pod.logs()] == ["line"]
    done = await pod.exec(["sh", "-c", "echo out; echo err >&2; exit 4"], check=False)
    assert (done.stdout, done.stderr, done.returncode) == (b"out\n", b"err\n", 4)
    double.options(page=2)
    try:
        assert len([each async for each in api.get("events")]) > 2
    finally:
        double.options(page=None)


# Real Ray.


@needs_bwrap
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_job_runs_on_real_ray_with_what_its_pod_is_given(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs ray: pip install 'ray[default]'")
    with cluster(ray=True) as double:
        api = Api(double, "default")
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "s"},
            "stringData": {"t": "sentinel"},
        }
        api("POST", "secrets", secret)
        script = {"job.sh": 'echo "$TOKEN" >/claim/token; ls /etc/secret >/claim/listed; exit 3\n'}
        api(
            "POST",
            "configmaps",
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "m"}, "data": script},
        )
        claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
        body = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "c"}}
        api("POST", "persistentvolumeclaims", {**body, "spec": claim})
        container = {
            "name": "ray",
            "image": "ray",
            "env": [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "t"}}}],
            "volumeMounts": [
                {"name": "m", "mountPath": "/etc/job"},
                {"name": "c", "mountPath": "/claim"},
                {"name": "s", "mountPath": "/etc/secret"},
            ],
        }
        volumes = [
            {"name": "m", "configMap": {"name": "m"}},
            {"name": "c", "persistentVolumeClaim": {"claimName": "c"}},
            {"name": "s", "secret": {"secretName": "s"}},
        ]
        job = rayjob("j", entrypoint="bash /etc/job/job.sh", entrypointNumCpus=1)
        head = {"containers": [container], "volumes": volumes}
        params = {"num-cpus": "1", "resources": json.dumps(json.dumps({"spot": 1}))}
        job["spec"]["rayClusterSpec"] = {
            "headGroupSpec": {"rayStartParams": params, "template": {"spec": head}}
        }
        api("POST", "rayjobs", job)
        api.history("j", "Failed", 300)
        status = api.status("j")
        assert status["jobStatus"] == "FAILED"
        assert "exit code 3" in status["message"]
        assert (double.claim("default", "c") / "token").read_text() == "sentinel\n"
        assert (double.claim("default", "c") / "listed").read_text() == "t\n"
        api("DELETE", "rayjobs/j")
        api.wait(lambda: not double.objects("Pod", "default"))
