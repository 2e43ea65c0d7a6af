job "x" {
  group "g" {
    task "t" {
      driver = "docker"
      config {
        a = cidrhost("10.0.0.0", 1)
        b = cidrhost("10.0.0.0/30", 4)
        c = cidrhost("10.0.0.0/30", -5)
        d = cidrhost("10.0.0.0/30", 1.5)
        f = cidrsubnet("10.0.0.0/30", 3, 0)
        g = cidrsubnet("10.0.0.0/16", 1, 2)
        i = cidrhost("${NOMAD_IP_x}/24", 1)
        j = reverse("${NOMAD_ALLOC_ID}")
        k = fileset(".", "*")
        l = filebase64("absent")
        m = convert("x", number)
      }
    }
  }
}
