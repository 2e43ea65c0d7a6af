id          = "grouped"
plugin_id   = "p"
snapshot_id = "snap-1"
capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}
mount_options {
  mount_group = 0
}
secrets = {
  token = { callback = "vault/token" }
}
