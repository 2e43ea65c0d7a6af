id          = "restored"
plugin_id   = "p"
snapshot_id = "/snapshots/1"
capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}
