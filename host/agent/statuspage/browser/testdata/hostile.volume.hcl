id           = "<img src=x onerror=alert(1)>"
name         = "hostile"
type         = "csi"
plugin_id    = "loopfs"
capacity_min = "1MiB"

capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}
