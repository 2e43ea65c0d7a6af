# A volume of MooseFS: a directory with a quota.

id           = "moosefs-notes"
name         = "moosefs-notes"
type         = "csi"
plugin_id    = "moosefs"
capacity_min = "100MiB"

capability {
  access_mode     = "multi-node-multi-writer"
  attachment_mode = "file-system"
}
