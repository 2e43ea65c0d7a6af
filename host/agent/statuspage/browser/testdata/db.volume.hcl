id           = "db"
name         = "db"
type         = "csi"
plugin_id    = "loopfs"
capacity_min = "32MiB"

capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}
