id        = "data"
plugin_id = "p"
capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}
mount_options {
  owner     = 1000
  group     = 1000
  mode      = "750"
  ownership = "recursive"
}
