"""The network interfaces of this machine."""


def interface(address: str) -> str:
    """The interface that has this IP address, or "unknown"."""
    import psutil  # the doctor can do without

    for name, addresses in psutil.net_if_addrs().items():
        if address in [entry.address.partition("%")[0] for entry in addresses]:
            return name
    return "unknown"
