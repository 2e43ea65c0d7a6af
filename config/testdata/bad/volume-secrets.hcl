id        = "v"
plugin_id = "p"
capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}
secrets {
  blank    = ""
  list     = ["hunter2"]
  runtime  = "${hunter2}"
  empty    = {}
  two      = { env = "A", file = "/b" }
  typo     = { enw = "hunter2" }
  relative = { file = "hunter2" }
  noname   = { env = "not a name" }
  unknown  = hunter2
  nested   = { env = hunter2 }
}
