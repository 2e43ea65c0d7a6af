# A volume without a file system, made by loopfs: the job raw-block writes to the device itself.

id           = "disk"
type         = "csi"
plugin_id    = "loopfs"
capacity_min = "16MiB"

capability {
  access_mode     = "single-node-writer"
  attachment_mode = "block-device"
}
