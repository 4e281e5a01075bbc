"""Policy files that are shipped with leto_elastic; installed as the package `leto_elastic.configs`."""
