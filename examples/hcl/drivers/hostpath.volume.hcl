# A volume of csi-driver-host-path.

id           = "hostpath-notes"
name         = "hostpath-notes"
type         = "csi"
plugin_id    = "hostpath"
capacity_min = "100MiB"

capability {
  access_mode     = "single-node-multi-writer"
  attachment_mode = "file-system"
}
