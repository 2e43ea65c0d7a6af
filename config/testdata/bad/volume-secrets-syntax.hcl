id        = "v"
plugin_id = "p"
secrets {
  password = hunter2 hunter3
}
