# One of the volumes of the job shards: shard[0], or with --var index=1 shard[1].

variable "index" {
  type    = number
  default = 0
}

id           = "shard[${var.index}]"
type         = "csi"
plugin_id    = "loopfs"
capacity_min = "16MiB"

capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}
