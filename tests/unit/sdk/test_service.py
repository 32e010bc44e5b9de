from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from dynamo_local.core.errors import GraphError, RpcError
from dynamo_local.sdk import (
    Call,
    Resources,
    async_on_shutdown,
    async_on_start,
    bind_clients,
    depends,
    endpoint,
    service,
    spec_of,
)
from dynamo_local.sdk.service import EndpointSpec, is_service, reply_type, request_type


@service()
class Backend:
    @endpoint()
    async def stream(self, count: int) -> AsyncIterator[str]:
        yield str(count)

    @endpoint("how-many")
    async def count(self) -> int:
        return 1


@service(namespace="shop", resources={"gpu": "1", "cpu": 2}, workers=3, role="front")
class Frontend:
    backend = depends(Backend)

    @async_on_start
    async def first(self) -> None: ...

    @async_on_shutdown
    async def last(self) -> None: ...

    @async_on_start
    async def a_second(self) -> None: ...


def test_the_spec_says_what_the_decorators_said() -> None:
    spec = spec_of(Frontend)
    assert (spec.name, spec.namespace, spec.workers, spec.role) == ("Frontend", "shop", 3, "front")
    assert spec.resources == Resources(gpu=1, cpu=2.0)
    assert spec.dependencies == {"backend": Backend}
    assert spec.on_start == ("first", "a_second")
    assert spec.on_shutdown == ("last",)
    assert spec_of(Backend).endpoints == {
        "stream": EndpointSpec("stream", "stream", streams=True, takes_request=True),
        "how-many": EndpointSpec("how-many", "count", streams=False, takes_request=False),
    }


def test_the_spec_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        spec_of(Frontend).workers = 4  # type: ignore[misc]
    with pytest.raises(TypeError):
        spec_of(Frontend).dependencies["other"] = Backend  # type: ignore[index]


def test_annotations_give_the_types_on_the_wire() -> None:
    stream, count = spec_of(Backend).endpoints["stream"], spec_of(Backend).endpoints["how-many"]
    assert (request_type(Backend, stream), reply_type(Backend, stream)) == (int, str)
    assert (request_type(Backend, count), reply_type(Backend, count)) == (Any, int)


def test_a_subclass_inherits_endpoints_and_hooks_but_is_no_service_by_itself() -> None:
    class Derived(Frontend):
        pass

    assert not is_service(Derived)
    again = service()(Derived)
    assert spec_of(again).on_start == ("first", "a_second")
    assert spec_of(again).dependencies == {"backend": Backend}


def test_an_overriding_method_without_the_mark_is_no_hook() -> None:
    class Derived(Frontend):
        async def first(self) -> None: ...

    assert spec_of(service()(Derived)).on_start == ("a_second",)


def test_a_dependency_outside_of_a_graph_says_so() -> None:
    with pytest.raises(GraphError, match=r"Frontend\.backend.*running graph only; start it with `dynamo serve`"):
        _ = Frontend().backend


def test_a_dependency_that_was_pruned_says_so() -> None:
    frontend = Frontend()
    bind_clients(frontend, {})
    with pytest.raises(GraphError, match=r"Frontend\.backend.*is not linked in this graph"):
        _ = frontend.backend


async def test_a_bound_client_is_what_the_dependency_gives() -> None:
    class Fake:
        def stream(self, request: Any = None) -> Call:
            return Call("Backend.stream", Backend().stream(request))  # type: ignore[arg-type]

        __getattr__: Any = None

    frontend = Frontend()
    bind_clients(frontend, {"backend": Fake()})
    assert [reply async for reply in frontend.backend.stream(3)] == ["3"]
    assert await frontend.backend.stream(4) == "4"


@pytest.mark.parametrize(("count", "found"), [(0, "nothing"), (2, "a stream")])
async def test_awaiting_wants_exactly_one_reply(count: int, found: str) -> None:
    async def replies() -> Any:
        for number in range(count):
            yield number

    with pytest.raises(RpcError, match=f"B.x answered with {found} where one reply was awaited"):
        await Call("B.x", replies())


def _a_class(name: str) -> type:
    return type(name, (), {})


@pytest.mark.parametrize(
    ("decorate", "message"),
    [
        (lambda: service()(_a_class("lower")), "service lower: service name 'lower' is not valid"),
        (lambda: service()(_a_class("Nats")), "service Nats: the name is reserved"),
        (
            lambda: service(workers=0)(_a_class("A")),
            "service A: workers must be a whole number of at least 1",
        ),
        (lambda: service(namespace="a.b")(_a_class("A")), "service A: namespace 'a.b' is not valid"),
        (
            lambda: service(resources={"tpu": 1})(_a_class("A")),
            "resources has no 'tpu'; allowed are gpu, cpu",
        ),
        (lambda: service(resources={"gpu": -1})(_a_class("A")), "resources.gpu must be a whole number"),
        (
            lambda: service(resources={"cpu": "lots"})(_a_class("A")),
            "resources.cpu must be a number of cores",
        ),
        (lambda: service(config=int)(_a_class("A")), "config=int is neither a dataclass nor"),
        (lambda: depends(int), r"depends\(int\): not a service; decorate it with @service"),
        (lambda: spec_of(int), "int is not a service"),
    ],
)
def test_a_wrong_declaration_is_a_graph_error(decorate: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        decorate()


def test_endpoints_are_asynchronous_and_take_one_request() -> None:
    with pytest.raises(GraphError, match="f is not asynchronous"):

        @endpoint()
        def f(self: Any) -> None: ...

    with pytest.raises(GraphError, match="g takes 2 arguments"):

        @endpoint()
        async def g(self: Any, one: int, two: int) -> None: ...

    with pytest.raises(GraphError, match=r"'a\.b' is not valid"):

        @endpoint("a.b")
        async def h(self: Any) -> None: ...

    with pytest.raises(GraphError, match="hook is not a coroutine method"):

        @async_on_start
        def hook(self: Any) -> None: ...


def test_two_endpoints_of_one_name_are_refused() -> None:
    class Twice:
        @endpoint("same")
        async def one(self) -> None: ...

        @endpoint("same")
        async def two(self) -> None: ...

    with pytest.raises(GraphError, match="two endpoints are called same"):
        service()(Twice)
