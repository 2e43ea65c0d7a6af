id        = "v"
plugin_id = "p"
capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}
mount_options {
  mount_group = "no group"
}
parameters {
  much = "${join("", range(1000))}${join("", range(1000))}"
}
context = { a = join("", concat(range(1000), range(1000))) }
secrets = "hunter2"
