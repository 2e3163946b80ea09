"""The device's side of transfers of KV between engines."""
