id        = "copy"
type      = "csi"
plugin_id = "p"
clone_id  = "copy"
capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}
