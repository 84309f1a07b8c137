"""What the control store keeps at a power cut: settings of buckets, users, policies, tags and grants."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from botocore.exceptions import ClientError

from tests.powercuts.traffic import Traffic, ask, error_code

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Hashable

    from tests.support.daemons import Daemon


class Settings(Traffic):
    """What the control store keeps: buckets with their settings, users, keys and policies; and the tags and
    grants of objects."""

    def change(self, daemon: Daemon, client: Any, number: int, chance: random.Random) -> None:
        kind = chance.choice(list(_SETTINGS))
        _SETTINGS[kind](self, daemon, client, f"client{number}", str(chance.randrange(1 << 30)))

    def find(self, daemon: Daemon, client: Any, name: str) -> Hashable:
        kind, _, whose = name.partition(" ")
        try:
            return str(found) if (found := _FOUND[kind](daemon, client, whose)) is not None else None
        except ClientError as error:
            if error_code(error).startswith("NoSuch"):
                return None
            raise

    def bucket_tags(self, daemon: Daemon, client: Any, who: str, value: str) -> None:
        self._create_bucket(client, f"{who}-settings")
        with self.changing(f"tags {who}", value):
            tags = {"TagSet": [{"Key": "k", "Value": value}]}
            client.put_bucket_tagging(Bucket=f"{who}-settings", Tagging=tags)

    def bucket_policy(self, daemon: Daemon, client: Any, who: str, value: str) -> None:
        self._create_bucket(client, f"{who}-settings")
        with self.changing(f"policy {who}", value):
            client.put_bucket_policy(Bucket=f"{who}-settings", Policy=json.dumps(_policy(who, value)))

    def object_tags(self, daemon: Daemon, client: Any, who: str, value: str) -> None:
        self._create_bucket(client, f"{who}-settings")
        name = {"Bucket": f"{who}-settings", "Key": "tagged"}
        try:
            client.head_object(**name)
        except ClientError:
            with self.changing(f"object {who}", "k= private"):
                client.put_object(**name, Body=b"x", Tagging="k=")
            return
        grant = "public-read" if int(value) % 2 else "private"
        before = self.histories[f"object {who}"].attempts[-1]
        tag = str(before.value).partition(" ")[0]
        if before.acknowledged and int(value) % 3 == 0:
            with self.changing(f"object {who}", f"{tag} {grant}"):
                client.put_object_acl(**name, ACL=grant)
        elif before.acknowledged:
            with self.changing(f"object {who}", f"k={value} {str(before.value).rpartition(' ')[2]}"):
                tags = {"TagSet": [{"Key": "k", "Value": value}]}
                client.put_object_tagging(**name, Tagging=tags)

    def bucket(self, daemon: Daemon, client: Any, who: str, value: str) -> None:  # type: ignore[override]
        """A bucket comes and goes."""
        there = _bucket_there(daemon, client, who)
        with self.changing(f"bucket {who}", None if there else "there"):
            (client.delete_bucket if there else client.create_bucket)(Bucket=f"{who}-bucket")

    def user(self, daemon: Daemon, client: Any, who: str, value: str) -> None:
        if daemon.request("GET", f"/-/admin/users/{who}").status == 404:
            with self.changing(f"user {who}", f"{value}@x.y"):
                asked = {"user_id": who, "policies": [], "email": f"{value}@x.y"}
                ask(daemon, "POST", "/-/admin/users", asked)
        else:
            with self.changing(f"user {who}", None):
                ask(daemon, "DELETE", f"/-/admin/users/{who}")

    def rights(self, daemon: Daemon, client: Any, who: str, value: str) -> None:
        with self.changing(f"rights {who}", value):
            ask(daemon, "PUT", f"/-/admin/policies/{who}", _rights(value))


_SETTINGS: Final[dict[str, Callable[..., None]]] = {
    "tags": Settings.bucket_tags,
    "policy": Settings.bucket_policy,
    "object": Settings.object_tags,
    "bucket": Settings.bucket,
    "user": Settings.user,
    "rights": Settings.rights,
}


def _policy(who: str, value: str) -> dict[str, Any]:
    resource = f"arn:aws:s3:::{who}-settings/{value}"
    allowed = {"Effect": "Allow", "Principal": "*", "Action": "s3:GetObject", "Resource": resource}
    return {"Version": "2012-10-17", "Statement": [allowed]}


def _rights(value: str) -> dict[str, Any]:
    allowed = {"Effect": "Allow", "Action": "s3:GetObject", "Resource": f"arn:aws:s3:::a/{value}"}
    return {"Version": "2012-10-17", "Statement": [allowed]}


def _bucket_tags(daemon: Daemon, client: Any, who: str) -> Any:
    return client.get_bucket_tagging(Bucket=f"{who}-settings")["TagSet"][0]["Value"]


def _bucket_policy(daemon: Daemon, client: Any, who: str) -> Any:
    found = json.loads(client.get_bucket_policy(Bucket=f"{who}-settings")["Policy"])
    return found["Statement"][0]["Resource"].rpartition("/")[2]


def _object(daemon: Daemon, client: Any, who: str) -> Any:
    name = {"Bucket": f"{who}-settings", "Key": "tagged"}
    tags = client.get_object_tagging(**name)["TagSet"]
    public = any(
        "AllUsers" in grant["Grantee"].get("URI", "") for grant in client.get_object_acl(**name)["Grants"]
    )
    return f"k={tags[0]['Value']} {'public-read' if public else 'private'}"


def _bucket_there(daemon: Daemon, client: Any, who: str) -> Any:
    names = {each["Name"] for each in client.list_buckets()["Buckets"]}
    return "there" if f"{who}-bucket" in names else None


def _user(daemon: Daemon, client: Any, who: str) -> Any:
    answer = daemon.request("GET", f"/-/admin/users/{who}")
    return None if answer.status == 404 else json.loads(answer.body)["email"]


def _right(daemon: Daemon, client: Any, who: str) -> Any:
    answer = daemon.request("GET", f"/-/admin/policies/{who}")
    if answer.status == 404:
        return None
    found = json.loads(answer.body)
    return json.dumps(found).rpartition("arn:aws:s3:::a/")[2].partition('"')[0]


_FOUND: Final[dict[str, Callable[[Daemon, Any, str], Any]]] = {
    "tags": _bucket_tags,
    "policy": _bucket_policy,
    "object": _object,
    "bucket": _bucket_there,
    "user": _user,
    "rights": _right,
}
