# A copy of the volume archive, which is in the same namespace. If only the plugin knows the volume to be copied, give
# the plugin's id for it as clone_external_id instead.

id        = "archive-copy"
type      = "csi"
plugin_id = "cloud-disks"
clone_id  = "archive"

capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}
