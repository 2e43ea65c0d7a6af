# The volume that the writer and the reader share.

id           = "notes"
name         = "notes"
type         = "csi"
plugin_id    = "loopfs"
capacity_min = "32MiB"
capacity_max = "64MiB"

capability {
  access_mode     = "single-node-multi-writer"
  attachment_mode = "file-system"
}
