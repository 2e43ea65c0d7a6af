# A volume, made by loopfs. The jobs writer and reader share it.

id        = "notes"
name      = "notes"
type      = "csi"
plugin_id = "loopfs"

capacity_min = "32MiB"
capacity_max = "64MiB"

capability {
  access_mode     = "single-node-multi-writer"
  attachment_mode = "file-system"
}

capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}
