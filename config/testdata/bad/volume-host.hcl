id          = "v"
type        = "host"
plugin_id   = "mkdir"
capacity_min = "2GB"
capacity_max = "1GB"
capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}
