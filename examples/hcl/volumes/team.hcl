# A volume for a group of people: job team says which.

id           = "team"
type         = "csi"
plugin_id    = "loopfs"
capacity_min = "16MiB"

capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}
