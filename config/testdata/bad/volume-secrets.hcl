id        = "v"
plugin_id = "p"
capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}
secrets {
  literal  = "hunter2"
  number   = 12345
  empty    = {}
  two      = { env = "A", file = "/b" }
  typo     = { enw = "hunter2" }
  relative = { file = "hunter2" }
  noname   = { env = "not a name" }
  unknown  = hunter2
  called   = upper("hunter2")
  nested   = { env = hunter2 }
}
