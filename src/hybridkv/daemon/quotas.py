"""Bounds of tenants that commands list and change at run time."""

import logging
from itertools import islice

from hybridkv.core.sizes import format_size
from hybridkv.daemon.quota_file import QuotaFile, StoredQuotas
from hybridkv.daemon.sessions import ClientConnection, RequestError
from hybridkv.store.store import Store
from hybridkv.wire import messages as wire
from hybridkv.wire.protocol import ErrorCode

logger = logging.getLogger("hybridkv.daemon")

OTHERS_MAX = 1000  # Tenants without a bound of their own that one answer has.


class Quotas:
    """The bounds of tenants, and the file that keeps those that were set at run time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.of_users = False  # True where a tenant is a user, and not a salt.
        self.served_default: int | None = None
        """The default that `serve` was given, which counts from each start on. None = none."""
        self._has_default = False  # Whether a default was set at run time.
        self._changed: set[int] = set()  # Tenants whose bound was set in this life. 0 = default.
        self.file: QuotaFile | None = None

    def read_quotas(self, _: ClientConnection, request: wire.ReadQuotas) -> wire.QuotaReport:
        """Answer the bounds and what counts against them."""
        return self._answer(request.id)

    def change_quota(self, _: ClientConnection, request: wire.SetQuota) -> wire.QuotaReport:
        """Change a bound, and answer all. Raises RequestError."""
        store, tenant = self._store, request.tenant
        is_new = tenant and not request.is_default and tenant not in store.own_quotas
        if is_new and len(store.own_quotas) >= wire.QUOTAS_MAX:
            raise RequestError(ErrorCode.QUOTAS)
        self._changed.add(tenant)
        if not tenant:
            self._has_default = True
            store.set_default_quota(request.bound_bytes)
        elif request.is_default:
            store.forget_own_quota(tenant)
        else:
            store.set_own_quota(tenant, request.bound_bytes)
        if self.file is not None:
            self.file.save_quotas(
                StoredQuotas(
                    of_users=self.of_users,
                    own={f"{tenant:016x}": bound for tenant, bound in store.own_quotas.items()},
                    default=store.tenant_bytes if self._has_default else None,
                    has_default=self._has_default,
                )
            )
        return self._answer(request.id)

    def on_file_read(self, stored: StoredQuotas) -> None:
        """Take what an earlier daemon's file has, except for what was set meanwhile."""
        store = self._store
        if stored.of_users != self.of_users:
            logger.warning(
                "quotas set at run time are of users in one life and of salts in another"
                ": they do not count"
            )
            return
        if stored.has_default and self.served_default is not None:
            text = "salt-quota: %s of this start wins over %s, which was set at run time"
            earlier = "none" if stored.default is None else format_size(stored.default)
            logger.warning(text, format_size(self.served_default), earlier)
        elif stored.has_default and 0 not in self._changed:
            self._has_default, store.tenant_bytes = True, stored.default
        own = {int(digits, 16): bound for digits, bound in stored.own.items()}
        kept = {tenant: own[tenant] for tenant in own if tenant and tenant not in self._changed}
        store.own_quotas |= dict(islice(kept.items(), wire.QUOTAS_MAX))
        store.set_default_quota(store.tenant_bytes)

    def tick(self) -> None:
        """Count and evict the next objects for bounds that were changed."""
        if self._store.has_quota_work:
            self._store.keep_quotas()

    def wakes_at(self) -> float:
        """Return when `tick` has something to do, if no event comes before."""
        return 0.0 if self._store.has_quota_work else float("inf")

    def _answer(self, request_id: int) -> wire.QuotaReport:
        store, file = self._store, self.file
        own = [
            wire.TenantQuota(tenant, bound, store.tenants[tenant], is_own=True)
            for tenant, bound in store.own_quotas.items()
        ]
        others = [
            wire.TenantQuota(tenant, store.tenant_bytes, held)
            for tenant, held in islice(store.tenants.items(), OTHERS_MAX)
            if tenant not in store.own_quotas and store.tenant_bytes is not None
        ]
        return wire.QuotaReport(
            id=request_id,
            default=store.tenant_bytes,
            served_default=self.served_default,
            quotas=[*own, *others],
            has_user_tenants=self.of_users,
            is_settled=not store.has_quota_work and (file is None or file.thread.is_settled),
            path="" if file is None else str(file.path),
            error="" if file is None else file.thread.error[: wire.FACT_MAX],
        )
