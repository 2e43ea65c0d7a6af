# A volume of democratic-csi's local-hostpath.

id           = "local-notes"
name         = "local-notes"
type         = "csi"
plugin_id    = "local-hostpath"
capacity_min = "100MiB"

capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}
