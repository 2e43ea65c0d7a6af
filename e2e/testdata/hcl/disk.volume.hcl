# A volume that one alloc at a time may use.

id           = "disk"
name         = "disk"
type         = "csi"
plugin_id    = "fake"
capacity_min = "1MiB"

capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}
