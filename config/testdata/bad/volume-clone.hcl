id                = "copy"
type              = "csi"
plugin_id         = "p"
clone_id          = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/disks/d"
clone_external_id = ""
capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}
