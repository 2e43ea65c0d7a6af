id                = "copy"
node              = "node-1"
plugin_id         = "p"
external_id       = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/disks/d"
clone_external_id = "server#share#data##"
capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}
